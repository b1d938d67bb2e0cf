package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
)

var (
	version    = regexp.MustCompile(`(?m)^version: (.+)$`)
	appVersion = regexp.MustCompile(`(?m)^(appVersion: ).+$`)
)

// versioned are the other files with the version, each with what precedes it.
var versioned = map[string]*regexp.Regexp{
	"charts/posthorn/Chart.yaml":        appVersion,
	"config/default/kustomization.yaml": regexp.MustCompile(`(newTag: ).+`),
	"docs/*.md":                         regexp.MustCompile(`(ghcr\.io/posthorn/posthorn:)[\w.-]+`),
	"analytics/client.go":               regexp.MustCompile(`(const Version = ")[^"]+`),
}

// setVersion writes the version of Chart.yaml to the other files, and returns it.
func setVersion() (string, error) {
	chart, err := os.ReadFile("charts/posthorn/Chart.yaml")
	if err != nil {
		return "", err
	}
	found := version.FindSubmatch(chart)
	if found == nil {
		return "", errors.New("charts/posthorn/Chart.yaml has no version")
	}
	for pattern, place := range versioned {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			return "", fmt.Errorf("%s: no file (%w)", pattern, err)
		}
		for _, file := range files {
			if err := replace(file, place, append([]byte("${1}"), found[1]...)); err != nil {
				return "", err
			}
		}
	}
	return string(found[1]), nil
}

func replace(file string, place *regexp.Regexp, with []byte) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return os.WriteFile(file, place.ReplaceAll(data, with), 0o644)
}
