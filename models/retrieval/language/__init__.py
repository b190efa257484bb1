"""LC-Rec and its students: language models as backbones."""
