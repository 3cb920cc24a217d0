"""How good is a trained model, how sure are we, where does it fail, and what does it say to a new image."""
