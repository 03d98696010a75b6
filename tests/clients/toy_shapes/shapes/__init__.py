"""Areas and perimeters of plane shapes."""
