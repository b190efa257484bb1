"""Code that uses Ray and MLflow: data, training, evaluation, comparison and serving."""
