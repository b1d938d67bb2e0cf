package dispatcher

import (
	"math"
	"time"
)

// Forecast of the disk.
const (
	// forecastInterval is the time between two samples of the disk.
	forecastInterval = 10 * time.Minute
	// maxForecastDays is the last day of the forecast.
	maxForecastDays = 30
	// forecastNoise is the share of the disk by which its usage varies without a trend: the store
	// writes and removes files of up to some hundred megabytes.
	forecastNoise = 0.01
)

// forecastWindows are the times over which growth is measured: the short one notices a receiver that
// is down, the long one slow growth.
var forecastWindows = [...]time.Duration{time.Hour, 24 * time.Hour}

// forecast estimates how long the disk lasts. The zero value is ready to use.
type forecast struct {
	samples []diskSample // the oldest first, of the last 24 hours
}

type diskSample struct {
	at   time.Time
	left int64
}

// days returns for how many days, rounded up, the bytes below the high-water mark last at the
// present rate: the rate of the window in which they decrease fastest. 0 means more than
// maxForecastDays, or not enough samples.
func (f *forecast) days(now time.Time, left, total int64) int {
	longest := forecastWindows[len(forecastWindows)-1]
	for len(f.samples) > 1 && now.Sub(f.samples[1].at) >= longest {
		f.samples = f.samples[1:]
	}
	if n := len(f.samples); n == 0 || now.Sub(f.samples[n-1].at) >= forecastInterval {
		f.samples = append(f.samples, diskSample{now, left})
	}
	fewest := math.Inf(1)
	for _, window := range forecastWindows {
		for i := len(f.samples) - 1; i >= 0; i-- {
			s := f.samples[i]
			if passed := now.Sub(s.at); passed >= window {
				if grown := float64(s.left - left); grown > forecastNoise*float64(total) {
					fewest = min(fewest, max(0, float64(left))/grown*passed.Hours()/24)
				}
				break
			}
		}
	}
	if fewest > maxForecastDays {
		return 0
	}
	return max(1, int(math.Ceil(fewest)))
}
