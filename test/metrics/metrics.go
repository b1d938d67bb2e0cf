// Package metrics compares the metrics of a process with docs/metrics.md, in both
// directions.
package metrics

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/posthorn/posthorn/test/env"
)

// names are the labels whose values are names of objects. All other labels have fixed sets
// of values.
var names = []string{"namespace", "source", "destination", "endpoint", "audience", "dispatcher", "slot"}

var code = regexp.MustCompile("`([a-z_]+)`")

// Documented returns the metrics of a section of docs/metrics.md, each with its
// sorted labels, separated by commas.
func Documented(section string) (map[string]string, error) {
	root, err := env.Root()
	if err != nil {
		return nil, err
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "metrics.md"))
	if err != nil {
		return nil, err
	}
	_, text, ok := strings.Cut(string(page), "\n## "+section+"\n")
	if !ok {
		return nil, fmt.Errorf("docs/metrics.md has no section %q", section)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	all := map[string]string{}
	for line := range strings.Lines(text) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 || !strings.Contains(cells[1], "`posthorn_") {
			continue
		}
		labels := strings.Split(strings.ReplaceAll(strings.TrimSpace(cells[2]), " ", ""), ",")
		slices.Sort(labels)
		for _, m := range code.FindAllStringSubmatch(cells[1], -1) {
			if _, twice := all[m[1]]; twice {
				return nil, fmt.Errorf("docs/metrics.md lists %s more than once", m[1])
			}
			all[m[1]] = strings.Join(labels, ",")
		}
	}
	return all, nil
}

// Differences reads an exposition and returns its differences from a section of
// docs/metrics.md: metrics and labels that only one of them has, and label values that
// no page explains.
func Differences(section string, exposition io.Reader) ([]string, error) {
	documented, err := Documented(section)
	if err != nil {
		return nil, err
	}
	words, err := documentation()
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(exposition)
	if err != nil {
		return nil, err
	}
	var differences []string
	for _, name := range slices.Sorted(maps.Keys(families)) {
		if !strings.HasPrefix(name, "posthorn_") {
			continue
		}
		want, ok := documented[name]
		delete(documented, name)
		if !ok {
			differences = append(differences, name+" is not documented")
			continue
		}
		if families[name].GetHelp() == "" {
			differences = append(differences, name+" has no help")
		}
		for _, m := range families[name].Metric {
			if got := labels(m); got != want {
				differences = append(differences, fmt.Sprintf("labels of %s: got %q, want %q as documented", name, got, want))
				break
			}
		}
		for _, m := range families[name].Metric {
			for _, l := range m.Label {
				if !slices.Contains(names, l.GetName()) && !strings.Contains(words, "`"+l.GetValue()+"`") {
					differences = append(differences, fmt.Sprintf("%s: no page explains the label value %s=%q", name, l.GetName(), l.GetValue()))
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(documented)) {
		differences = append(differences, name+" is documented but missing")
	}
	return differences, nil
}

func labels(m *dto.Metric) string {
	var all []string
	for _, l := range m.Label {
		all = append(all, l.GetName())
	}
	slices.Sort(all)
	return strings.Join(all, ",")
}

// documentation is the text of all pages.
func documentation() (string, error) {
	root, err := env.Root()
	if err != nil {
		return "", err
	}
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		return "", err
	}
	var all strings.Builder
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			return "", err
		}
		all.Write(text)
	}
	return all.String(), nil
}
