"""A checkpoint made ready for use elsewhere: an MLflow model, a registered version, a service, an exported program."""
