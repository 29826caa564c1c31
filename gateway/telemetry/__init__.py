"""What the gateway says of itself: counts, traces, logs. Knows no part that it looks at."""
