package cli

import (
	"time"

	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// moment parses the value of --since or --until: a duration before now, or a time. It is zero for "".
func moment(flag, text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return time.Now().Add(-d), nil
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return t, command.Usagef("%s %q: use a duration like 2h or a time like 2026-01-02T03:04:05Z", flag, text)
	}
	return t, nil
}

// never is the value of --ttl that keeps an object.
const never = "never"

// minWaitTTL is the lowest --ttl of a command that reads the result from the object.
const minWaitTTL = 10 * time.Second

// ttlSeconds parses the value of --ttl, which has the meaning of ttlSecondsAfterFinished: 0s deletes
// the object when it has finished, and never, the result nil, keeps it.
func ttlSeconds(text string, wait bool) (*int32, error) {
	if text == never {
		return nil, nil
	}
	ttl, err := time.ParseDuration(text)
	switch {
	case err != nil || ttl < 0 || ttl%time.Second != 0 || ttl > 365*24*time.Hour:
		return nil, command.Usagef("--ttl %q: use whole seconds, from 0s to a year, or %s", text, never)
	case wait && ttl < minWaitTTL:
		return nil, command.Usagef("--ttl %s: use %s or more with --wait, which reads the result from the object", text, minWaitTTL)
	}
	return ptr.To(int32(ttl / time.Second)), nil
}
