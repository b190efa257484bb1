"""Search spaces as data (`grids/*.yaml`, one per documented grid) and the sweep over them."""
