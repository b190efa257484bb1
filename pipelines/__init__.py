"""Everything distributed, in the order the data flows: data, training, evaluation."""
