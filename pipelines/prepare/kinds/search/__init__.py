"""The request kind `search`: which results will a user click?"""
