"""What reproduces the papers: claims, published figures, scripts, kept runs, and looks inside of models."""
