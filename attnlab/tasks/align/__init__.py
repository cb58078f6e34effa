"""Translation from English to French, and the word alignment that attention learns."""
