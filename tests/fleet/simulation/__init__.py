"""The simulated fleet: error rates of whole rollouts, reverts, storms."""
