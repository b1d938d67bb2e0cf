package host

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

const (
	// configDelay is how long a process may lack a live config that another one has. It is longer than a
	// watch needs to connect again.
	configDelay = 30 * time.Second
	// announcedConfigs is the number of live configs that a heartbeat names: the newest ones. A watch that hangs
	// lacks at least one of them, also if one number is in the future because of a wrong clock.
	announcedConfigs = 8
)

// configVersions compares the live configs of this process with the other processes' ones: a watch can hang without
// an error.
type configVersions struct {
	// numbers has the present configs, and deleted the configs that were deleted while this
	// process ran, by namespace.
	numbers, deleted map[string]int64
	// lacking are the configs that another process has.
	lacking map[string]lackingConfig
}

// lackingConfig is a number that another process has had since a time.
type lackingConfig struct {
	number int64
	since  time.Time
}

func newConfigVersions() configVersions {
	return configVersions{numbers: map[string]int64{}, deleted: map[string]int64{}, lacking: map[string]lackingConfig{}}
}

// set takes the number of a valid config. A config with a lower number than before does not take effect.
func (v *configVersions) set(namespace string, number int64) {
	v.numbers[namespace] = max(v.numbers[namespace], number)
}

func (v *configVersions) remove(namespace string) {
	v.deleted[namespace] = max(v.deleted[namespace], v.numbers[namespace])
	delete(v.numbers, namespace)
}

// newest returns the newest configs.
func (v *configVersions) newest() (list []slots.ConfigNumber) {
	for namespace, number := range v.numbers {
		list = append(list, slots.ConfigNumber{Namespace: namespace, Number: number})
	}
	slices.SortFunc(list, func(a, b slots.ConfigNumber) int {
		return cmp.Or(cmp.Compare(b.Number, a.Number), cmp.Compare(a.Namespace, b.Namespace))
	})
	return slices.Clip(list[:min(len(list), announcedConfigs)])
}

// compare takes the numbers that the other processes announce.
func (v *configVersions) compare(now time.Time, announced map[string]int64) {
	for namespace := range v.lacking {
		if _, ok := announced[namespace]; !ok {
			delete(v.lacking, namespace)
		}
	}
	for namespace, number := range announced {
		has := max(v.numbers[namespace], v.deleted[namespace])
		if has >= number {
			delete(v.lacking, namespace)
		} else if l, ok := v.lacking[namespace]; !ok || has >= l.number {
			v.lacking[namespace] = lackingConfig{number, now}
		}
	}
}

// problem describes a config that this process has lacked for longer than a delay, with the fix; empty for none.
func (v *configVersions) problem(now time.Time, delay time.Duration) string {
	for _, namespace := range slices.Sorted(maps.Keys(v.lacking)) {
		if l := v.lacking[namespace]; now.Sub(l.since) >= delay {
			return fmt.Sprintf("the live config of namespace %s has number %d in another process, and %d in this one, which takes no slot and hands over its slots: check the connection to the API server, and restart this process if its watch hangs", namespace, l.number, v.numbers[namespace])
		}
	}
	return ""
}
