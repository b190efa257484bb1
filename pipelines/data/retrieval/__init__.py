"""Each behaviour asks for itself: which item comes next?"""
