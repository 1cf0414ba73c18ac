"""The loop that resizes the fleet: reads demand, asks a planner, and does what the plan says."""
