"""The request kind `actions`: which actions will a user take on an item?"""
