"""An impression asks: what will this user do with this item?"""
