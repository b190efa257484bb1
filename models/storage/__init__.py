"""Tables with manifests, URIs, locks and the files of checkpoints."""
