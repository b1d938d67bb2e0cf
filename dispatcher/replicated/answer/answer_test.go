package answer

import (
	"errors"
	"net/http"
	"testing"
)

func TestWriter(t *testing.T) {
	var w Writer
	if w.Status() != http.StatusOK || len(w.Body()) != 0 {
		t.Errorf("zero value: got %d with %d bytes, want 200 without any", w.Status(), len(w.Body()))
	}
	w.WriteHeader(http.StatusEarlyHints)
	w.WriteHeader(http.StatusTeapot)
	w.WriteHeader(http.StatusOK)
	if w.Status() != http.StatusTeapot {
		t.Errorf("status: got %d, want the first that is not informational", w.Status())
	}
	for _, c := range []struct {
		size int
		want error
	}{{MaxBytes - 1, nil}, {2, ErrTooLarge}, {1, nil}} {
		if _, err := w.Write(make([]byte, c.size)); !errors.Is(err, c.want) {
			t.Errorf("%d bytes after %d: got %v, want %v", c.size, len(w.Body()), err, c.want)
		}
	}
	if len(w.Body()) != MaxBytes {
		t.Errorf("body: got %d bytes, want %d", len(w.Body()), MaxBytes)
	}
}
