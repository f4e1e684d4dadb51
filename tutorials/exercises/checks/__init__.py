"""What is looked at in each exercise: one file per concept."""
