"""A search asks, with the results that it showed: which of them will be clicked?"""
