package standalone

import (
	"bytes"
	"fmt"
	"os"
	"time"
)

// expire removes the manifests of objects whose TTL has ended, as the operator
// deletes the objects, in some namespaces. It keeps a file that contains other objects.
// The mutex is held.
func (c *Control) expire(namespaces map[string]bool, now time.Time) {
	for _, o := range c.store.objects {
		if o.resource == nil || !namespaces[o.namespace] {
			continue
		}
		if at, ok := o.of.Health.Expires(o.resource); !ok || now.Before(at) {
			continue
		}
		err := removeManifest(o.file, c.store.files[o.file])
		switch {
		case err == nil:
			c.log.Info("object removed; its TTL has ended", "kind", o.kind, "namespace", o.namespace, "name", o.name, "file", o.file)
		case !c.kept[o.id]:
			c.kept[o.id] = true
			c.log.Warn("object not removed, although its TTL has ended", "kind", o.kind, "namespace", o.namespace, "name", o.name, "error", err)
		}
	}
}

// removeManifest removes a file that contains one object and has not changed since it was
// read.
func removeManifest(path string, f *file) error {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is a link; remove its target", path)
	case f == nil || len(f.objects) != 1 || len(f.broken)+len(f.problems)+len(f.ignored) > 0:
		return fmt.Errorf("%s contains other objects; remove the object from it", path)
	}
	text, err := readFile(path)
	if err != nil {
		return err
	}
	if !bytes.Equal(text, f.text) {
		return fmt.Errorf("%s has changed since it was read", path)
	}
	return os.Remove(path)
}
