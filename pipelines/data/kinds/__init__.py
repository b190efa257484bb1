"""What differs between kinds of request, one folder each; `table.py` names them all."""
