"""From the images of a source to batches of uint8 pixels: ordered, augmented, made ahead."""
