"""A checkpoint made ready for use elsewhere: an MLflow model, a registered version, an exported program."""
