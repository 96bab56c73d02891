"""The closed forms: pure functions on numbers, which also take symbols and so print themselves as JavaScript."""
