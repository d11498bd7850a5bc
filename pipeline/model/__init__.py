"""What is trained, and which of its parameters decay. Nothing in here knows how many processes there are."""
