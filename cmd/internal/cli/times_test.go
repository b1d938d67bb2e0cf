package cli

import (
	"testing"
	"time"
)

func TestMoment(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	if got, err := moment("--since", "2026-01-02T03:04:05Z"); err != nil || !got.Equal(at) {
		t.Errorf("a time: got %v and %v, want %v", got, err, at)
	}
	if got, err := moment("--since", "2h"); err != nil || time.Since(got) < 2*time.Hour || time.Since(got) > 3*time.Hour {
		t.Errorf("a duration: got %v and %v, want two hours ago", got, err)
	}
	if got, err := moment("--since", ""); err != nil || !got.IsZero() {
		t.Errorf("nothing: got %v and %v, want the zero time", got, err)
	}
	for _, text := range []string{"yesterday", "-2h", "6", "2026-01-02"} {
		if got, err := moment("--since", text); err == nil {
			t.Errorf("%s: got %v, want an error", text, got)
		}
	}
}

// The flag --ttl has the meaning of ttlSecondsAfterFinished.
func TestTTL(t *testing.T) {
	for text, want := range map[string]int32{"0": 0, "0s": 0, "1s": 1, "10m": 600, "8760h": 31536000} {
		if got, err := ttlSeconds(text, false); err != nil || got == nil || *got != want {
			t.Errorf("%s: got %v and %v, want %d", text, got, err, want)
		}
	}
	if got, err := ttlSeconds(never, true); err != nil || got != nil {
		t.Errorf("never: got %v and %v, want nil", got, err)
	}
	for _, text := range []string{"", "-1s", "1500ms", "8761h", "5"} {
		if got, err := ttlSeconds(text, false); err == nil {
			t.Errorf("%s: got %v, want an error", text, *got)
		}
	}
	if got, err := ttlSeconds("9s", true); err == nil {
		t.Errorf("9s with --wait: got %v, want an error", *got)
	}
	if got, err := ttlSeconds("10s", true); err != nil || *got != 10 {
		t.Errorf("10s with --wait: got %v and %v, want 10", got, err)
	}
}
