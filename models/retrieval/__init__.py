"""The retrieval family: which item comes next, out of the whole catalogue?"""
