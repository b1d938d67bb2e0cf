package compile

import (
	"cmp"
	"time"
)

// Policy is what the administrator of an installation permits.
type Policy struct {
	// CheckHost returns the reason why deliveries to a URL's host are denied; nil allows
	// every host.
	CheckHost func(host string) error
	// MaxTimeout is the ceiling of spec.delivery.timeout, at most liveconfig.MaxTimeout.
	// Default DefaultMaxTimeout.
	MaxTimeout time.Duration
	// MaxRetryWindow is the ceiling of spec.delivery.retry.window, at most
	// liveconfig.MaxRetryWindow. Default DefaultMaxRetryWindow.
	MaxRetryWindow time.Duration
}

// The ceilings' defaults are the specification's values.
const (
	DefaultMaxTimeout     = 5 * time.Second
	DefaultMaxRetryWindow = 4 * time.Hour
)

func (p Policy) maxTimeout() time.Duration { return cmp.Or(p.MaxTimeout, DefaultMaxTimeout) }
func (p Policy) maxRetryWindow() time.Duration {
	return cmp.Or(p.MaxRetryWindow, DefaultMaxRetryWindow)
}
