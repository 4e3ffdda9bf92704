"""Which layer can go how low: errors of each layer in each recipe, and the assignment that fits a loss budget."""
