"""The request kind `retrieval`: which item comes next?"""
