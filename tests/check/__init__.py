"""The shape of the code and of the checkout: which way imports point, what lies where, how set-up behaves."""
