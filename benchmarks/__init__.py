"""Scripts that measure; README.md has a command for each table. They import the torchtitan of their own checkout."""
