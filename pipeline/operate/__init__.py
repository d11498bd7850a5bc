"""What a person does with a run: launch it, judge it, measure it."""
