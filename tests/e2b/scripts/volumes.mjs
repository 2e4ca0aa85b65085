// What the client for JavaScript does with volumes.
import { Sandbox, Volume } from 'e2b'

const seen = {}
const volume = await Volume.create(process.argv[2])
try {
  seen.found = (await Volume.list()).some((one) => one.volumeId === volume.volumeId)
  const again = await Volume.connect(volume.volumeId)
  seen.dir = (await again.makeDir('/a/b', { force: true })).type
  seen.wrote = (await again.writeFile('/a/b/note.txt', 'hello')).size
  seen.read = await again.readFile('/a/b/note.txt')
  seen.list = (await again.list('/', { depth: 3 })).map((one) => one.path)
  seen.mode = (await again.updateMetadata('/a/b/note.txt', { mode: 0o600, uid: 7 })).uid
  const sandbox = await Sandbox.create({ timeoutMs: 60_000, volumeMounts: { '/data': volume } })
  seen.inside = (await sandbox.commands.run('sudo cat /data/a/b/note.txt')).stdout
  await sandbox.kill()
  await again.remove('/a')
  seen.exists = await again.exists('/a/b/note.txt')
} finally {
  seen.end = [await Volume.destroy(volume.volumeId), await Volume.destroy(volume.volumeId)]
}
console.log(JSON.stringify(seen))
