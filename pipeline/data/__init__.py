"""From files to batches of uint8 pixels: which images there are, in which order, decoded and augmented by address."""
