"""How long a step takes: what costs how much (`machine`), in which order (`rehearsal`, `recording`), and the event simulator."""
