package v1beta1

import (
	"encoding/json"
	"testing"
	"time"
)

// A duration is written in the format of GEP-2257, and read again as the same.
func TestDuration(t *testing.T) {
	for want, d := range map[string]time.Duration{
		"0s": 0, "500ms": 500 * time.Millisecond, "1s500ms": 1500 * time.Millisecond, "1m30s": 90 * time.Second,
		"1h30m": 90 * time.Minute, "8760h": 8760 * time.Hour, "1h1ms": time.Hour + time.Millisecond, "2s": 2*time.Second + 999,
	} {
		got, err := json.Marshal(&Duration{d})
		if err != nil || string(got) != `"`+want+`"` {
			t.Errorf("write %v: got %s and error %v, want %q", d, got, err, want)
		}
		var read Duration
		if err := json.Unmarshal(got, &read); err != nil || read.Duration != d.Truncate(time.Millisecond) {
			t.Errorf("read %s: got %v and error %v, want %v", got, read, err, d.Truncate(time.Millisecond))
		}
	}
	for _, bad := range []string{`5`, `"5"`, `"x"`} {
		if err := json.Unmarshal([]byte(bad), &Duration{}); err == nil {
			t.Errorf("read %s: got no error, want one", bad)
		}
	}
}
