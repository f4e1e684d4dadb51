"""What users do between steps: read and set whole parameters, save and load, clip gradients."""
