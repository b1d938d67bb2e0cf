package v1beta1

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// Duration is a duration in the format of GEP-2257, as in the Gateway API: whole hours, minutes, seconds
// and milliseconds, with at most five digits each, such as 1h30m or 500ms. metav1.Duration would write
// 1.5s, which is not in this format.
// +kubebuilder:validation:Type=string
// +kubebuilder:validation:MaxLength=32
type Duration struct {
	time.Duration `json:"-"`
}

// UnmarshalJSON reads a duration. The CRDs have the rules for its format and bounds.
func (d *Duration) UnmarshalJSON(text []byte) (err error) {
	var s string
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	d.Duration, err = time.ParseDuration(s)
	return err
}

// MarshalJSON writes a duration, without fractions of a millisecond.
func (d Duration) MarshalJSON() ([]byte, error) {
	var s strings.Builder
	rest := d.Duration
	for _, unit := range []struct {
		name   string
		length time.Duration
	}{{"h", time.Hour}, {"m", time.Minute}, {"s", time.Second}, {"ms", time.Millisecond}} {
		if n := rest / unit.length; n > 0 {
			fmt.Fprintf(&s, "%d%s", n, unit.name)
			rest -= n * unit.length
		}
	}
	if s.Len() == 0 {
		s.WriteString("0s")
	}
	return json.Marshal(s.String())
}
