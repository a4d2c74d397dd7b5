"""The operators in plain torch: each reads like its definition and takes any float dtype; the others must equal it."""
