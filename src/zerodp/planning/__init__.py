"""Know before you run: bytes, wire and what fits, from numbers alone. `plan.py` is the door; `closed/` has the formulas."""
