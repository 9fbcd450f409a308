"""Jobs whose devices are of several classes: what they must say, and strategies for them."""
