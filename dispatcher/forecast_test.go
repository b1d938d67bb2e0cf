package dispatcher

import (
	"testing"
	"time"
)

func TestForecast(t *testing.T) {
	const total = 100_000
	hour, day := time.Hour, 24*time.Hour
	for _, tc := range []struct {
		name string
		// left returns the bytes below the high-water mark after a time.
		left func(after time.Duration) int64
		runs time.Duration
		want int
	}{
		{"no growth", func(time.Duration) int64 { return 50_000 }, 3 * day, 0},
		{"shrinks", func(d time.Duration) int64 { return 50_000 + int64(d/hour)*100 }, 2 * day, 0},
		{"started just now", func(d time.Duration) int64 { return 50_000 - int64(d/time.Minute)*500 }, 50 * time.Minute, 0},
		{"a burst, after an hour", func(d time.Duration) int64 { return 50_000 - int64(d/hour)*2_000 }, hour, 1},
		{"slow growth, after an hour", func(d time.Duration) int64 { return 50_000 - int64(d/hour)*100 }, hour, 0},
		{"slow growth, after a day", func(d time.Duration) int64 { return 52_400 - int64(d/hour)*100 }, day, 21},
		{"slow growth, after three days", func(d time.Duration) int64 { return 57_200 - int64(d/hour)*100 }, 3 * day, 21},
		{"growth of months", func(d time.Duration) int64 { return 60_000 - int64(d/hour)*45 }, 2 * day, 0},
		{"files that come and go", func(d time.Duration) int64 { return 50_000 - int64(d/(20*time.Minute)%2)*900 }, 2 * day, 0},
		{"full", func(d time.Duration) int64 { return 24_000 - int64(d/hour)*1_000 }, day, 1},
		{"above the mark", func(d time.Duration) int64 { return 10_000 - int64(d/hour)*1_000 }, day, 1},
		{"growth ended an hour ago", func(d time.Duration) int64 { return 50_000 - int64(min(d, 47*hour)/hour)*5 }, 2 * day, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var f forecast
			start, got := time.Now(), 0
			for after := time.Duration(0); after <= tc.runs; after += time.Minute {
				got = f.days(start.Add(after), tc.left(after), total)
			}
			if got != tc.want {
				t.Errorf("days: got %d, want %d", got, tc.want)
			}
			if n, most := len(f.samples), int(day/forecastInterval)+2; n > most {
				t.Errorf("samples: got %d, want at most %d", n, most)
			}
		})
	}
}
