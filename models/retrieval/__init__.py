"""Models of the kind retrieval: which item comes next, out of the whole catalogue?"""
