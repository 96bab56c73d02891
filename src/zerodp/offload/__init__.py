"""Model states on tiers: where each piece of masters, gradients, optimizer states and parameters rests, and how it is reached."""
