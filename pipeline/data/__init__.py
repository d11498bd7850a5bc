"""From image files to batches of uint8 pixels: indexed, ordered, decoded and augmented."""
