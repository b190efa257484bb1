"""Sweeps over the search spaces of `grids/*.yaml`, one file per documented grid."""
