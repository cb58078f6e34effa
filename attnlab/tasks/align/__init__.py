"""Translation from English to French, and the alignment that attention learns."""
