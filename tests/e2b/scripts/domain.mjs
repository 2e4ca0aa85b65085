// The same as domain.py with the client for JavaScript.
import { appendFileSync } from 'node:fs'
import { Sandbox, Volume } from 'e2b'
import { OPTIONS, session } from './session.mjs'

const DOMAIN = process.env.E2B_DOMAIN
const leadHere = (...names) =>
  names.forEach((name) => appendFileSync('/etc/hosts', `127.0.0.1 ${name}.${DOMAIN.split(':')[0]}\n`))

leadHere('api')
const seen = {}
const sandbox = await Sandbox.create(OPTIONS)
const { sandboxId } = sandbox
leadHere(`49983-${sandboxId}`, `8000-${sandboxId}`)
try {
  const host = sandbox.getHost(49983)
  seen.host = host === `49983-${sandboxId}.${DOMAIN}`
  seen.url = (await sandbox.downloadUrl('f')).startsWith(`https://${host}/files?`)
  await sandbox.files.write('served/page', 'a page')
  let begun
  const listening = new Promise((resolve) => (begun = resolve))
  const options = { background: true, cwd: '/home/user/served', onStdout: begun }
  const serving = await sandbox.commands.run('python3 -u -m http.server 8000 2>&1', options)
  await listening
  seen.port = await (await fetch(`https://${sandbox.getHost(8000)}/page`)).text()
  await serving.kill()
  const volume = await Volume.create(`by-name-${sandboxId}`)
  await volume.writeFile('/note', 'kept')
  seen.volume = [await volume.readFile('/note'), await Volume.destroy(volume.volumeId)]
  seen.session = await session(sandbox)
} finally {
  await sandbox.kill()
}
console.log(JSON.stringify(seen))
