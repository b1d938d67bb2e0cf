package page

import (
	"fmt"
	"html/template"
	"strconv"
	"strings"
	"time"

	"github.com/posthorn/posthorn/internal/plural"
)

var functions = template.FuncMap{"num": num, "short": short, "ago": ago, "until": until, "clock": clock, "span": span, "size": size,
	"parts": parts, "lower": strings.ToLower,
	"sentence": sentence, "shell": shell, "plural": func(n any, what string) string { return plural.Formatted(fmt.Sprint(n), what) },
	"percent": func(part, whole int) string {
		if whole == 0 {
			return "-"
		}
		return fmt.Sprintf("%d %%", part*100/whole)
	},
	"share": func(part, whole int64) int64 { return part * 100 / max(1, whole) },
	"soon":  func(now, t time.Time) bool { return t.Sub(now) < 14*24*time.Hour },
}

// shell quotes a word for a shell: a messageId may have any characters.
func shell(word string) string {
	safe := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || strings.ContainsRune("0123456789-_.:/@", r)
	}
	if word != "" && strings.IndexFunc(word, func(r rune) bool { return !safe(r) }) < 0 {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// num writes a number with separators: 1,234,567.
func num(n any) string {
	text := fmt.Sprint(n)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// short writes a number in at most five characters: 12.3k.
func short(n int64) string {
	for _, unit := range []struct {
		size int64
		name string
	}{{1e9, "G"}, {1e6, "M"}, {1e4, "k"}} {
		if n >= unit.size {
			scale := unit.size
			if unit.name == "k" {
				scale = 1e3
			}
			return strconv.FormatFloat(float64(n*10/scale)/10, 'f', -1, 64) + unit.name
		}
	}
	return num(n)
}

func size(bytes int64) string {
	for _, unit := range []struct {
		size int64
		name string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}} {
		if bytes >= unit.size {
			return fmt.Sprintf("%.1f %s", float64(bytes)/float64(unit.size), unit.name)
		}
	}
	return fmt.Sprintf("%d KiB", bytes>>10)
}

// span writes a duration with two digits or more: 1.2 ms, 340 ms, 5.1 s.
func span(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/1e6)
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// length writes a duration with its largest unit.
func length(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours())/24)
}

func ago(now, t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	if d := now.Sub(t); d >= time.Second {
		return length(d) + " ago"
	}
	return "just now"
}

func until(now, t time.Time) string {
	switch d := t.Sub(now); {
	case t.IsZero():
		return "-"
	case d < time.Second:
		return "now"
	default:
		return "in " + length(d)
	}
}

func clock(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

func count(n int64, what string) string { return plural.Formatted(num(n), what) }

// sentence begins with a capital letter and ends with a full stop.
func sentence(text string) string {
	if text == "" || strings.HasSuffix(text, ".") || strings.HasSuffix(text, "?") {
		return text
	}
	return text + "."
}
