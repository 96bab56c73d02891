"""Other frameworks; each file is imported by whoever needs it, and by nothing else."""
